"""Training from a store to a posterior: what a configuration asks for, under Lightning, in a run directory.

The same call again goes on from the last checkpoint, on any number of processes; a run that is done is only loaded.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only

from storage.design import Finding, find_design_faults
from storage.errors import StoreError
from storage.room import check_output, check_room
from storage.store import Store, exists, open_store
from vcal_dist import few_runs
from vcal_dist.allocation import keep_pages
from vcal_dist.assessment import assess_observations, assess_runs, assess_validation
from vcal_dist.calibration import CalibrationModel
from vcal_dist.checkpoints import LAST, Checkpoints
from vcal_dist.config import Config, DeviceSettings
from vcal_dist.datamodule import StoreData
from vcal_dist.errors import ConfigError, Diverged, Malformed, ModelError, Preempted
from vcal_dist.few_runs import why_not
from vcal_dist.fitting import check
from vcal_dist.initialise import place_start
from vcal_dist.module import CalibrationModule
from vcal_dist.plan import Chosen, Totals
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import borehole
from vcal_dist.progress import Progress
from vcal_dist.records import Records, records_until, seconds_of
from vcal_dist.rows import LEAVE_ONE_OUT, AtHand, held_rows, rows_at_hand
from vcal_dist.run_directory import (
    CHECKPOINTS,
    CONFIG,
    GLANCE,
    begin,
    cannot_go_on,
    held,
    look,
    refuse_held,
    versions,
    wait,
)
from vcal_dist.run_place import RunPlace, run_place
from vcal_dist.schedule import Schedule, check_family
from vcal_dist.stages import choose, emulator_groups, is_collapsible
from vcal_dist.strategy import DataParallel, Launched
from vcal_dist.threads import torch_threads
from vcal_dist.way import way
from vcal_dist.work import Fitted, Found, Work

PATIENCE = 120.0  # seconds until processes of an attempt that failed are gone, and a node's locks with it
MOST_ROWS_OF_DESIGN = 2_000_000
DTYPES = {"float32": torch.float32, "float64": torch.float64}
Say = Callable[[str], None]


def train(
    config: Config,
    *,
    progress: bool = True,
    say: Say = lambda _: None,
    callbacks: Iterable[Callback] = (),
    launched: Launched | None = None,
) -> Posterior:
    """The posterior that the configuration asks for; it is also in the run directory `config.output`.

    `say` hears what is worth a line: the plan, where a run goes on. `launched` says that this process is one of those
    that a cluster has started; `config.devices` then has no say. Raises `Preempted` after SIGTERM or Ctrl-C.
    """
    if launched is None:
        processes(config.devices)  # before any work
    with run_place(config.output) as place:
        return _train(config, place, progress, say, callbacks, launched)


def look_ahead(config: Config, place: RunPlace, say: Say = lambda _: None) -> Posterior | None:
    """What can be told before processes are started: the posterior that is there already, or what is wrong."""
    store = open_or_make(config)
    rows, _ = look(config, place, store)
    found = _finished(place, say)
    if found is None:
        prepare(config, store.first(*rows))
    return found


def _finished(place: RunPlace, say: Say) -> Posterior | None:
    if not (place.path / FILE).exists():
        return None
    say(f"the run in {place.url} is done already; delete it or choose another output to train anew")
    return Posterior.load(place.path)


def _train(
    config: Config,
    place: RunPlace,
    progress: bool,
    say: Say,
    callbacks: Iterable[Callback],
    launched: Launched | None,
) -> Posterior:
    run, first = place.path, is_first()
    if first and launched is None:  # a cluster's own earlier attempt may still be ending
        refuse_held(run)
    store = open_or_make(config, first=first)
    rows, state = look(config, place, store, first=first)
    done = _finished(place, say)
    if done is not None:
        return done
    store = store.first(*rows)
    if state is not None:
        say(f"going on after step {state['schedule']['steps']} of the run in {place.url}")
    begun = time.perf_counter()
    if state is not None:  # what earlier attempts took, up to the checkpoint
        begun -= seconds_of(records_until(run, state["schedule"]["steps"]))
    prepared = prepare(config, store)
    if first:
        check_output(run / CONFIG)
        check_room(run, _least_bytes(prepared), "a run of this size")
    design = look_at_design(store) if first else None
    for finding in design or []:
        say(f"{'WARNING' if finding.severity == 'bad' else 'note'}: {finding.message}")
    for line in describe(prepared.planned(), prepared.totals, prepared.at_hand):
        say(line)
    options: dict[str, Any] = {"progress": progress, "callbacks": callbacks, "launched": launched}
    if not first:
        fitted = fit(prepared, place, state, **options)
        return Posterior.from_fitted(store.problem, prepared.at_hand.scaling, fitted, {})
    with held(run, patience=GLANCE if launched is None else PATIENCE):
        begin(config, run, rows)
        place.send()
        fitted = fit(prepared, place, state, **options)
        record = {
            "config": config.plain(),
            "versions": versions(),
            "rows": {"runs": store.runs.rows, "observations": store.observations.rows},
            "seconds": time.perf_counter() - begun,
            "assessment": assess(prepared, fitted),
            "counts": fitted.counts,
            "theta": way(fitted, config.fit.weights),
            "log_evidence_runs": fitted.log_evidence_runs,
            "bound": fitted.bound,
            "runs": prepared.at_hand.distinct,
            "design": None if design is None else [asdict(finding) for finding in design],
        }
        posterior = Posterior.from_fitted(store.problem, prepared.at_hand.scaling, fitted, record)
        posterior.save(run)
        place.send()
    return posterior


def _least_bytes(prepared: Prepared) -> int:
    """What two checkpoints and a posterior take at least: each has the model, and what the runs say of its weights."""
    model = prepared.model
    state = sum(tensor.nbytes for tensor in model.state_dict().values())
    factorised = prepared.config.fit.weights == "meanfield" or prepared.at_hand.stacked
    weights = 2 * model.width if factorised else model.width**2
    return 3 * (state + 8 * model.outputs * weights)


def look_at_design(store: Store) -> list[Finding] | None:
    """What the store's runs cannot teach; None where they are so many that looking would take long."""
    if store.runs.rows + store.observations.rows > MOST_ROWS_OF_DESIGN:
        return None
    return find_design_faults(store)


def moment(config: Config) -> dict[str, Any]:
    """The assessment of what the last checkpoint holds, as training would end with it there: of `meanfield` only.

    Other weights have no q(θ̃, w) before their last phases. What it says of rows that are left out one by one, and not
    held out, means something only once q has learned from them.
    """
    with run_place(config.output) as place:
        store = open_or_make(config)
        rows, state = look(config, place, store)
    if config.fit.weights != "meanfield" or state is None:
        what = "no checkpoint" if state is None else f"weights '{config.fit.weights}'; only meanfield can be judged"
        raise ConfigError(f"the run in {config.output} cannot be judged before it is done: it has {what}")
    prepared = prepare(config, store.first(*rows))
    work = Work(prepared.model, config.fit, prepared.totals, config.seed, None)
    Schedule(work).load(state["schedule"])
    assert work.found.q is not None
    return assess(prepared, Fitted(work.model, [work.found.q], torch.zeros(1, dtype=torch.float64)))


def is_first() -> bool:
    """Whether this process is the one that writes and speaks, also before the processes know each other."""
    other_node = any(os.environ.get(name, "0") != "0" for name in ("NODE_RANK", "GROUP_RANK"))
    return getattr(rank_zero_only, "rank", None) in (None, 0) and not other_node


@dataclass(frozen=True)
class Prepared:
    """Everything that training begins with."""

    config: Config
    store: Store
    at_hand: AtHand
    model: CalibrationModel
    totals: Totals

    def check_rows(self, name: str, rows: Any) -> None:
        """Refuses a value that the likelihood cannot have made, by its row in the store."""
        likelihood = self.model.likelihood_z if name == "runs" else self.model.likelihood_y
        values, names = rows.z if name == "runs" else rows.y, [output.name for output in self.store.problem.outputs]
        try:
            likelihood.check(values, names)
        except ModelError:
            for i in range(len(values)):
                try:
                    likelihood.check(values[i : i + 1], names)
                except ModelError as error:
                    raise ModelError(f"row {int(rows.row[i])} of the {name} in the store: {error}") from None

    def planned(self) -> list[Chosen]:
        """The stages with everything decided."""
        fit = self.config.fit
        found = []
        for name in fit.stages:
            reads_runs = fit.weights == "meanfield" or name == "emulator" or (name == "joint" and fit.free_emulator)
            reads_field = name in ("theta", "joint", "weights_and_theta", "everything")
            chosen = choose(self.model, self.totals, fit, name, runs=reads_runs, observations=reads_field)
            if name == "emulator" and self.at_hand.stacked:
                stage = fit.emulator
                default = chosen.steps if stage.steps is not None or stage.epochs is not None else few_runs.STEPS
                chosen = chosen._replace(
                    steps=default, runs=min(self.totals.runs, few_runs.batch_rows(self.at_hand.distinct))
                )
            elif name == "emulator" and is_collapsible(self.model, fit)[0] and not emulator_groups(self.model, 1.0):
                chosen = chosen._replace(steps=0)  # all of η is known: `Descent` takes no step either
            found.append(chosen)
        return found


def prepare(config: Config, store: Store, *, stacked: bool | None = None) -> Prepared:
    """Rows at hand, the model, the counts; everything that can be wrong with them is said here.

    `stacked` says whether the emulator is, where that is known from an earlier training.
    """
    for table in (store.runs, store.observations):
        if not table.rows:
            raise ConfigError(f"the store {store.url} has no {table.name}; add some with 'vcal ingest --append'")
    dtype = DTYPES[config.devices.precision]
    at_hand = rows_at_hand(
        store,
        config.model,
        config.transforms,
        fit=config.fit,
        holdout=config.data.holdout,
        holdout_rows=config.data.holdout_rows,
        dtype=dtype,
        stacked=stacked,
    )
    if config.model.emulator == "stacked" and not at_hand.stacked:
        reason = why_not(config.model, config.fit, at_hand.distinct)
        raise ConfigError(f"model.emulator is 'stacked', but {reason}; change that, or leave model.emulator at auto")
    problem = store.problem
    model = CalibrationModel(
        len(problem.control_inputs),
        ThetaPrior.from_problem(problem),
        len(problem.outputs),
        config.model,
        dtype=dtype,
    )
    totals = Totals(store.runs.rows - len(at_hand.held_runs), store.observations.rows - len(at_hand.held_observations))
    prepared = Prepared(config, store, at_hand, model, totals)
    prepared.check_rows("runs", at_hand.runs)
    prepared.check_rows("observations", at_hand.observations)
    check(model, at_hand.runs, at_hand.observations)
    check_family(model, config.fit)
    place_start(model.prior, config.fit.start, torch.zeros(model.prior.dim, dtype=torch.float64))
    return prepared


def fit(
    prepared: Prepared,
    place: RunPlace | None,
    state: dict[str, Any] | None,
    *,
    progress: bool,
    callbacks: Iterable[Callback] = (),
    launched: Launched | None = None,
    found: Found | None = None,
) -> Fitted:
    """Lightning over all phases, or of what was `found` the last; without a place nothing is written."""
    config, store = prepared.config, prepared.store
    run = None if place is None else place.path
    module = CalibrationModule(
        prepared.model,
        prepared.at_hand,
        config.fit,
        prepared.totals,
        config.seed,
        None if state is None else state["schedule"],
        found,
    )
    orders = None if state is None else state["orders"]
    data = StoreData(store, prepared.at_hand, config.data, config.seed, prepared.check_rows, orders)
    records = Records(run, config.record_every, list(prepared.model.prior.names))
    used: list[Callback] = [records, *callbacks]
    checkpoints = None
    if place is not None:
        checkpoints = Checkpoints(place.path / CHECKPOINTS, config.checkpoints, state, partial(place.send, must=False))
        used.append(checkpoints)
    if progress:
        used.append(Progress(records))
    with threads(config.devices, launched), quiet():
        trainer = make_trainer(config.devices, used, run, launched)
        try:
            trainer.fit(module, datamodule=data)
        except Diverged as error:
            if place is not None and (place.path / CHECKPOINTS).exists():
                raise Diverged(f"{error}; the last good checkpoint is in {place.url}/{CHECKPOINTS}") from error
            raise
        except Malformed as error:
            if place is None:
                raise
            raise cannot_go_on(place.path, f"{CHECKPOINTS}/{LAST} is no checkpoint of it: {error}") from error
    if place is not None and checkpoints is not None and checkpoints.stopped:
        place.send()
        steps = module.schedule.steps
        raise Preempted(
            f"stopped by a signal after step {steps}; the same command goes on from there, in {place.url}",
            checkpoints.signal,
        )
    return Fitted.from_work(module.schedule.work).cpu()


def accelerator(devices: DeviceSettings) -> str:
    """Lightning's own choice would also take what has no float64."""
    if devices.accelerator != "auto":
        return devices.accelerator
    return "gpu" if torch.cuda.is_available() else "cpu"


def processes(devices: DeviceSettings) -> int:
    """How many train together, on all nodes; refuses GPUs that are not there."""
    on_gpus, found = accelerator(devices) == "gpu", torch.cuda.device_count()
    asked = devices.devices if isinstance(devices.devices, int) else max(1, found) if on_gpus else 1
    if on_gpus and asked > found:
        raise ConfigError(
            f"devices asks for {asked} GPU(s), torch {torch.__version__} sees {found}; give devices.accelerator=cpu, "
            "fewer devices, or install a CUDA build of torch"
        )
    return asked * devices.num_nodes


def make_trainer(
    devices: DeviceSettings, callbacks: list[Callback], run: Path | None, launched: Launched | None = None
) -> Trainer:
    """A trainer that leaves logs, checkpoints and progress to our callbacks."""
    trainer = Trainer(
        **(_placed(devices) if launched is None else _placed_by_cluster(launched)),
        max_epochs=-1,
        reload_dataloaders_every_n_epochs=1,  # an epoch is a leg
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
        default_root_dir=run,
    )
    # Lightning asks all processes before every batch whether one was told to stop; our votes travel with the gradients.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


def _placed(devices: DeviceSettings) -> dict[str, Any]:
    """Processes and devices as the configuration says."""
    backend = None if devices.backend == "auto" else devices.backend
    return {
        "accelerator": accelerator(devices),
        "devices": devices.devices,
        "num_nodes": devices.num_nodes,
        "strategy": DataParallel(backend, devices.timeout) if processes(devices) > 1 else "auto",
        "plugins": [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else None,
    }


def _placed_by_cluster(launched: Launched) -> dict[str, Any]:
    """Processes and devices as they were given."""
    return {
        "accelerator": launched.accelerator,
        "devices": 1,
        "strategy": launched.strategy,
        "plugins": [launched.environment],
    }


def assess(prepared: Prepared, fitted: Fitted) -> dict[str, Any]:
    """How well rows are predicted that training did not see; rows of small tables are left out one by one."""
    at_hand, found = prepared.at_hand, {}
    if fitted.validation is not None:
        found["runs"] = assess_validation(at_hand.scaling, at_hand.runs, fitted.validation)._asdict()
    for name, judge in (("runs", assess_runs), ("observations", assess_observations)):
        table, held = getattr(at_hand, name), getattr(at_hand, f"held_{name}")
        if name in found:
            continue
        small = len(table.row) == getattr(prepared.store, name).rows <= LEAVE_ONE_OUT
        if not len(held) and not small:
            continue
        rows = held_rows(table, held) if len(held) else table
        if bool((rows.z if name == "runs" else rows.y).isnan().all()):
            continue
        judged = judge(
            fitted.model,
            fitted.components,
            fitted.log_weights,
            at_hand.scaling,
            rows,
            leave_one_out=not len(held),
            draws=64 if len(held) else 256,  # leaving out one by one weighs the draws, so that fewer count
            seed=prepared.config.seed,
        )
        found[name] = judged._asdict()
    return found


def describe(planned: list[Chosen], totals: Totals, at_hand: AtHand | None = None) -> Iterator[str]:
    """The plan, a line a stage."""
    runs = f"{totals.runs:,} runs"
    if at_hand is not None and at_hand.run is not None:
        held = f" ({len(at_hand.held_runs):,} more rows are of runs held out)" if len(at_hand.held_runs) else ""
        runs = f"{totals.runs:,} rows of {at_hand.distinct:,} runs{held}"
    yield f"training on {runs} and {totals.observations:,} observations"
    if at_hand is not None and at_hand.stacked:
        folds = few_runs.count_folds(at_hand.distinct)
        yield (
            f"  few runs: the emulator is trained in {folds} folds of whole runs, {few_runs.REPEATS} times, and "
            "stacked with two Gaussian processes by its error at the runs it did not see"
        )
    for stage in planned:
        if not stage.steps:
            yield f"  {stage.name}: no steps"
            continue
        rows = [
            f"{size:,} {name} ({_count(stage.steps * size / max(count, 1))} epochs)"
            for size, name, count in (
                (stage.runs, "runs", totals.runs),
                (stage.observations, "observations", totals.observations),
            )
            if size
        ]
        yield f"  {stage.name}: {stage.steps:,} steps of {' and '.join(rows)}, rate {stage.rate:g}"


def _count(number: float) -> str:
    """With three digits, large ones in full."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def open_or_make(config: Config, *, first: bool = True) -> Store:
    """The store; if there is none and the configuration says how, the first process makes it and the others wait."""
    asked = config.generate
    if asked is None:
        return open_store(config.store)

    def made() -> bool:
        return exists(config.store) and open_store(config.store).observations.rows > 0

    if not made():
        if first:
            try:
                return borehole.make_store(config.store, asked.runs, asked.observations, seed=asked.seed)
            except StoreError:
                other = exists(config.store) and open_store(config.store).runs.rows > 0 and not made()
                if other or not exists(config.store):
                    raise  # else another training makes it, which began at the same moment
        wait(made, f"make the store {config.store}", config.devices.timeout)
    return open_store(config.store)


@contextmanager
def threads(devices: DeviceSettings, launched: Launched | None = None) -> Iterator[None]:
    """So many threads of this process as were asked for; processes on one machine share its cores."""
    keep_pages()
    count = devices.threads
    if count is None and launched is not None:
        count = launched.threads
    elif count is None and isinstance(devices.devices, int) and devices.devices > 1:
        count = max(1, len(os.sched_getaffinity(0)) // devices.devices)
    with torch_threads(count):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's greetings, and its advice on workers: rows are read ahead by threads of Dask."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # one need not use it
            # Lightning 2.6 asks torch 2.13 an old question.
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
