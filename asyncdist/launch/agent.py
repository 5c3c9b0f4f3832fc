"""`asyncdist run`: a launcher of one node, from its start to its exit code."""

from __future__ import annotations

from typing import Final

from asyncdist.launch.config import LaunchConfig
from asyncdist.launch.node_agent import NodeAgent
from asyncdist.launch.output import OutputWriter

__all__ = ["run"]

_OUTPUT_CLOSE_TIMEOUT_S: Final = 2.0
"""After an interruption: how long a blocked terminal may hold up the exit. Otherwise output is waited for."""


async def run(config: LaunchConfig, *, stdout_fd: int = 1, stderr_fd: int = 2) -> int:
    """Launch this node's workers and see the job to its end; return the exit code for the launcher.

    0 if every worker of every node ended with 0; the first failure's exit code (128 + n for signal n); 128 + n if
    signal n ended the job. Raises LaunchError if the job could not be started. Cancellation kills the workers.
    """
    stdout = OutputWriter(stdout_fd)
    stderr = OutputWriter(stderr_fd)
    agent = _agent_class(config)(config, stdout, stderr)
    finished = False
    try:
        exitcode = await agent.run()
        finished = not agent.interrupted
        return exitcode
    finally:
        timeout_s = None if finished else _OUTPUT_CLOSE_TIMEOUT_S
        await agent.logs.close(timeout_s)
        await stdout.close(timeout_s)
        await stderr.close(timeout_s)


def _agent_class(config: LaunchConfig) -> type[NodeAgent]:
    """Imported when it is used, so that a launcher starts quickly."""
    if config.min_nodes is None:
        from asyncdist.launch.fixed import FixedAgent

        return FixedAgent
    from asyncdist.launch.elastic import ElasticAgent

    return ElasticAgent
