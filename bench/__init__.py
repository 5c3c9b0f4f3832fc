"""Benchmarks: every figure of asyncdist beside its neighbors', measured in the same run and verified.

``python -m bench`` runs every subject; ``python -m bench p2p`` one of them; ``python -m bench --targets`` checks the
figures this project promises. How a figure is taken, always:

* An untimed barrier, then one operation. A sample is the slowest rank's time.
* The median of at least 200 small or 20 large samples makes one run.
* Runs alternate with the neighbors' runs, at least five rounds; a ratio is the median of the rounds' ratios, so a
  machine that is busy for a second disturbs both sides alike.
* Ranks are pinned (rank r on core r mod cores) and free; both are printed.
* Every result is verified outside the timed part; a wrong one is counted in the column ``wrong``, which must be 0.
* The neighbors are optional (extra ``peers``). One that is missing is named in one line and shown as missing.

The honest lower limit is ``bench/floors.py``: header, matching and one await on bare sockets, nothing else.
"""
