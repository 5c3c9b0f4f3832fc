"""Weights: a trainer's versions in the memory of servers that come and go, each version at once on all or on none.

from asyncdist import weights

async with weights.publish("policy", store=store) as publisher:           # the trainer
    await publisher.commit(17, {"w": w, "b": b})

async for version in weights.subscribe("policy", into=arrays, store=store):     # each server
    ...                                                                   # arrays["w"] is version 17's from now on

await weights.wait_ready("policy", 17, count=3, store=store)              # whoever sends them requests
"""

from asyncdist.weights.manifest import WeightsError
from asyncdist.weights.publisher import Publisher, publish
from asyncdist.weights.readiness import ready, wait_ready
from asyncdist.weights.subscriber import Subscription, Version, subscribe

__all__ = ["Publisher", "Subscription", "Version", "WeightsError", "publish", "ready", "subscribe", "wait_ready"]
