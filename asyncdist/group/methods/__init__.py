"""The operations of a group, by subject; `ProcessGroup` inherits them all and says how they are issued."""
