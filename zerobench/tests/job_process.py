"""One process of a job, for tests: `python -m zerobench.tests.job_process FOLDER NAME:N:SECONDS...`, in its environment.

Process 0 launches the workers of `subjects` by name on N ranks each, with a deadline, and prints the name before and the
record after.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from zerobench.case import Case, Run
from zerobench.launch import agent, control, job
from zerobench.launch.local import LaunchError
from zerobench.launch.nodes import Nodes


def main(folder: str, launches: list[str]) -> int:
    control.LOST_S = 6.0  # tests do not wait as long as a user would
    me = job.find()
    assert me is not None
    if me.rank:
        return agent.serve(me)
    try:
        with Nodes(me, Path(folder)) as nodes:
            for name, n, seconds in (launch.split(":") for launch in launches):
                print(name, flush=True)
                run = Run("plain", Case("subject", "subject", "none", int(n)))
                record = nodes.launch(run, deadline_s=float(seconds), target=f"zerobench.tests.subjects:{name}")
                print(json.dumps(record.to_json()), flush=True)
    except LaunchError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return agent.BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
