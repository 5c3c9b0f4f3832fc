"""Benchmarks: every figure of asyncdist beside its neighbors', measured in the same run and verified.

``python -m bench`` runs every subject; ``python -m bench p2p`` one of them; ``python -m bench --targets`` (or
``--targets collectives``, ``--targets shared-memory``) checks the figures this project promises. ``--transport``,
``--peers``, ``--operations``, ``--sizes`` and ``--ranks`` narrow what is run; ``--format osu|nccl|json`` prints as
other suites do; ``--plot`` draws. How a figure is taken, always:

* An untimed barrier, then one operation. A sample is the slowest rank's time; gloo runs on ``lo`` with one torch
  thread, Open MPI as it is started by default: spinning.
* The median of at least 200 small or 20 large samples, over all rounds. Where a neighbor would need too long, it takes
  fewer; the column ``n`` says how many.
* Runs alternate with the neighbors' runs, at least five rounds, every other one in the opposite order; a ratio is the
  median of the rounds' ratios, so a machine that is busy for a second or slows down disturbs all sides alike.
* Ranks are pinned (rank r on core r mod cores) and free; both are printed. The same processes are measured both ways.
* Every result is verified outside the timed part; a wrong one is counted in the column ``wrong``, which must be 0.
  Results above 1 MiB are checked whole at the end of a run, and at every thousandth element before.
* Processor time is that of the whole process, all threads, within the timed part. The event loop is watched, and memory
  measured, in operations of their own: watching disturbs.
* The neighbors are optional (extra ``peers``). One that is missing is named in one line and shown as missing, and so is
  an operation that one does not offer.

All libraries are timed by the same lines (``bench/driver.py``); what differs is in ``bench/adapters.py``. The honest
lower limit is ``bench/floors.py``: header, matching and one await on bare sockets, nothing else; below it lies only the
raw copy of the bytes.
"""
