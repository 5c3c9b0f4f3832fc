"""asyncio without ranks: loops, tasks, deadlines, cleanup that cancellation does not interrupt, call sites."""
