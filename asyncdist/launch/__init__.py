"""Starting the processes of a job: `asyncdist run` (agent.py) and `asyncdist.spawn` (spawn.py)."""
