"""The adapter to vLLM, driven as vLLM drives its engines."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from vllm_stand_in import Client, Model, Source, install

from asyncdist_server import serve_in_thread


@pytest.fixture
def server():
    with serve_in_thread("127.0.0.1", 0) as running:
        yield running


@pytest.fixture
def adapter(monkeypatch):
    engines, trainers = install(monkeypatch)
    vllm = importlib.import_module("asyncdist.weights.vllm")
    vllm.register()
    assert (engines.registry, trainers.registry) == ({"asyncdist": vllm.Engine}, {"asyncdist": vllm.TrainerEngine})
    return vllm


def test_workers_load_what_the_trainer_sends(adapter, server):
    workers = [adapter.Engine(None, None, "cpu", Model()) for _ in range(3)]
    source = Source(w=np.ones((3, 4), np.float32), b=np.zeros(2))
    info = adapter.TrainerInfo("127.0.0.1", server.port, timeout_s=20.0, rank=0)
    trainer = adapter.TrainerEngine.trainer_init(None, info, client=Client(workers), source=source)
    for step in range(3):
        source["w"] += step
        trainer.send_weights()
        for worker in workers:
            assert not worker.model.reloading
            assert (worker.model.weights["w"] == source["w"]).all()
    source["w"][:] = 7
    assert not (workers[0].model.weights["w"] == 7).any()
    trainer.shutdown()
    for worker in workers:
        worker.shutdown()
        worker.shutdown()


def test_only_the_sender_publishes(adapter):
    seen = []
    source = Source(w=np.ones(1))
    info = adapter.TrainerInfo("127.0.0.1", 1, rank=1)
    trainer = adapter.TrainerEngine.trainer_init(None, info, client=None, source=source)
    trainer.send_weights()
    trainer.shutdown()
    assert not seen


def test_what_does_not_come_is_said(adapter, server):
    worker = adapter.Engine(None, None, "cpu", Model())
    with pytest.raises(RuntimeError, match="init_transfer_engine"):
        worker.finish_weight_update()
    with pytest.raises(ValueError, match="Invalid init_info"):
        worker.parse_init_info({"no": 1})
    worker.init_transfer_engine(worker.parse_init_info({"store_host": "127.0.0.1", "store_port": server.port}))
    worker.start_weight_update()
    with pytest.raises(TimeoutError):
        worker.update_weights({"version": 9, "timeout_s": 0.05})
    with pytest.raises(NotImplementedError, match="TrainerEngine"):
        worker.trainer_send_weights(iter([]), {})
    worker.shutdown()
