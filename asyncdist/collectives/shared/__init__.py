"""Collectives through memory that the ranks of a host share.

Payloads go one of three ways, which the sender chooses for each:

| way | the payload | who chooses it |
| --- | --- | --- |
| inline | lies in the operation's record | short operations (`recipes`); uneven ones rank by rank |
| bcopy | is copied into the sender's pool, and out of it | an item that the others cannot read where it lies |
| zcopy | is read where it lies: in a segment of arrays, or in the sender's process | a long item of an exposed buffer |

A long item of an uneven collective that can only be copied comes by message instead.

| file | what |
| --- | --- |
| `agreement` | whether a tag has a lane, and what its members have mapped |
| `layout`, `turns`, `items`, `inline` (`Inline`) | the memory: what is where, the order of operations, their payloads |
| `inline` (`InlineQueue`), `recipes` | inline operations under way; which calls are inline |
| `runner` | operations in steps, and all wake-ups |
"""
