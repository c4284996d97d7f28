"""An S3 server that fails on command, as a script: ADDRESS PORT FILE.

While FILE says `500`, every request is answered with that; while it says a number of seconds, each takes so long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def main(address: str, port: int, told: Path) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)

    def faulty(environ: Any, start_response: Any) -> Any:
        fault = told.read_text(encoding="utf-8").strip() if told.exists() else ""
        if fault == "500":
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if fault:
            time.sleep(float(fault))
        return app(environ, start_response)

    run_simple(address, port, faulty, threaded=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
