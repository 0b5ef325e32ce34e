"""One rank of a large world in one process: tensors without memory, collectives without peers. The rest is the worker's.

`launch.simulate` starts a process for each chosen rank; `work` is what it does there. Beneath it, from the session and
its probes to the judge, everything is the same code as on real ranks.
"""
