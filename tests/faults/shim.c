/* Fails one chosen system call below one directory: loaded with LD_PRELOAD, armed by the process itself.

   Python, HDF5 and Rust's libraries all reach the kernel through these functions of the C library. A call counts if
   its path, or the path of its descriptor, lies below the root that `faults_arm` was given. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, WRITE, FSYNC, RENAME, MKDIR, UNLINK, KINDS };
enum { PASS = 0, SHORT = -1 };

static char root[PATH_MAX], passed[PATH_MAX], struck[PATH_MAX];
static size_t root_length;
static int chosen = -1, fault, sticky;
static long which;
static atomic_int full, hits;
static atomic_long counts[KINDS];

/* Counts calls below `below`, but those whose path contains `not`, unless that is empty. The `number`-th call (from 1) of `kind` gives `error`, or is cut short if that is -1.
   With `stays`, whatever needs room on the disk fails from then on. */
void faults_arm(const char *below, const char *not, int kind, long number, int error, int stays) {
    for (int i = 0; i < KINDS; i++) atomic_store(&counts[i], 0);
    atomic_store(&full, 0);
    atomic_store(&hits, 0);
    snprintf(root, sizeof root, "%s", below);
    snprintf(passed, sizeof passed, "%s", not);
    struck[0] = 0;
    chosen = kind, which = number, fault = error, sticky = stays;
    root_length = strlen(root);
}

void faults_disarm(void) { root_length = 0; }
long faults_count(int kind) { return atomic_load(&counts[kind]); }
int faults_hits(void) { return atomic_load(&hits); }
const char *faults_struck(void) { return struck; }

static int below(const char *path) {
    int inside = strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
    return inside && (!passed[0] || strstr(path + root_length, passed) == NULL);
}

static int descriptor_path(int descriptor, char *found) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, found, PATH_MAX - 1);
    if (length < 0) return 0;
    found[length] = 0;
    return 1;
}

static int named(int folder, const char *path, char *found) {
    char start[PATH_MAX];
    if (path == NULL) return 0;
    if (path[0] == '/') return snprintf(found, PATH_MAX, "%s", path) > 0;
    if (folder == AT_FDCWD ? getcwd(start, sizeof start) == NULL : !descriptor_path(folder, start)) return 0;
    return snprintf(found, 2 * PATH_MAX, "%s/%s", start, path) > 0;
}

/* What this call is to do: PASS, SHORT or an errno. */
static int decide(enum kind kind, const char *path, int needs_room) {
    if (!below(path)) return PASS;
    long number = atomic_fetch_add(&counts[kind], 1) + 1;
    if (kind == (enum kind)chosen && number == which) {
        snprintf(struck, sizeof struck, "%s", path);
        atomic_fetch_add(&hits, 1);
        if (sticky) atomic_store(&full, 1);
        return fault;
    }
    return needs_room && atomic_load(&full) ? fault : PASS;
}

static int decide_name(enum kind kind, int folder, const char *path, int needs_room) {
    char found[2 * PATH_MAX + 2];
    if (!root_length) return PASS;
    int before = errno;
    int decision = named(folder, path, found) ? decide(kind, found, needs_room) : PASS;
    errno = before;
    return decision;
}

static int decide_descriptor(enum kind kind, int descriptor, int needs_room) {
    char found[PATH_MAX];
    if (!root_length) return PASS;
    int before = errno;
    int decision = descriptor_path(descriptor, found) ? decide(kind, found, needs_room) : PASS;
    errno = before;
    return decision;
}

#define REAL(name) ((__typeof__(&name))real(&saved_##name, #name))
#define SAVED(name) static void *saved_##name
static void *real(void **saved, const char *name) {
    if (*saved == NULL) *saved = dlsym(RTLD_NEXT, name);
    return *saved;
}

#define FAIL(decision)        \
    do {                      \
        int error = decision; \
        if (error > 0) {      \
            errno = error;    \
            return -1;        \
        }                     \
    } while (0)

#define OPENS(name, first, folder, ...)                                              \
    SAVED(name);                                                                     \
    int name(first const char *path, int flags, ...) {                               \
        mode_t mode = 0;                                                             \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                       \
            va_list more;                                                            \
            va_start(more, flags);                                                   \
            mode = va_arg(more, mode_t);                                             \
            va_end(more);                                                            \
        }                                                                            \
        FAIL(decide_name(OPEN, folder, path, (flags & O_CREAT) != 0));               \
        return REAL(name)(__VA_ARGS__, flags, mode);                                 \
    }
#define NOTHING
#define FOLDER int folder,
OPENS(open, NOTHING, AT_FDCWD, path)
OPENS(open64, NOTHING, AT_FDCWD, path)
OPENS(openat, FOLDER, folder, folder, path)
OPENS(openat64, FOLDER, folder, folder, path)

SAVED(write);
ssize_t write(int descriptor, const void *data, size_t count) {
    int decision = decide_descriptor(WRITE, descriptor, 1);
    FAIL(decision);
    return REAL(write)(descriptor, data, decision == SHORT && count > 1 ? count / 2 : count);
}

#define PWRITES(name, offset_type)                                                                             \
    SAVED(name);                                                                                               \
    ssize_t name(int descriptor, const void *data, size_t count, offset_type offset) {                         \
        int decision = decide_descriptor(WRITE, descriptor, 1);                                                \
        FAIL(decision);                                                                                        \
        return REAL(name)(descriptor, data, decision == SHORT && count > 1 ? count / 2 : count, offset);       \
    }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

SAVED(writev);
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    int decision = decide_descriptor(WRITE, descriptor, 1);
    FAIL(decision);
    return REAL(writev)(descriptor, parts, decision == SHORT && count > 1 ? count / 2 : count);
}

SAVED(fsync);
int fsync(int descriptor) {
    FAIL(decide_descriptor(FSYNC, descriptor, 0));
    return REAL(fsync)(descriptor);
}
SAVED(fdatasync);
int fdatasync(int descriptor) {
    FAIL(decide_descriptor(FSYNC, descriptor, 0));
    return REAL(fdatasync)(descriptor);
}

SAVED(rename);
int rename(const char *from, const char *to) {
    FAIL(decide_name(RENAME, AT_FDCWD, to, 0));
    return REAL(rename)(from, to);
}
SAVED(renameat);
int renameat(int folder, const char *from, int target, const char *to) {
    FAIL(decide_name(RENAME, target, to, 0));
    return REAL(renameat)(folder, from, target, to);
}

SAVED(mkdir);
int mkdir(const char *path, mode_t mode) {
    FAIL(decide_name(MKDIR, AT_FDCWD, path, 1));
    return REAL(mkdir)(path, mode);
}
SAVED(mkdirat);
int mkdirat(int folder, const char *path, mode_t mode) {
    FAIL(decide_name(MKDIR, folder, path, 1));
    return REAL(mkdirat)(folder, path, mode);
}

SAVED(unlink);
int unlink(const char *path) {
    FAIL(decide_name(UNLINK, AT_FDCWD, path, 0));
    return REAL(unlink)(path);
}
SAVED(unlinkat);
int unlinkat(int folder, const char *path, int flags) {
    FAIL(decide_name(UNLINK, folder, path, 0));
    return REAL(unlinkat)(folder, path, flags);
}
