"""As much of `vllm.distributed.weight_transfer` as an engine meets, and a fleet of workers that are threads.

Written after vLLM's `base.py` and `factory.py`; what moves tensors between processes there is left out.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

__all__ = ["Client", "Model", "Source", "install"]


class InitInfo(ABC):  # noqa: B024 - as there
    pass


class UpdateInfo(ABC):  # noqa: B024 - as there
    pass


@dataclass
class TrainerInitInfo(InitInfo):
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class Engine(ABC):
    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.model_config = None
        self.device = device
        self.model = model

    def parse_init_info(self, init: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**init)
        except TypeError as error:
            raise ValueError(f"Invalid init_info: {error}") from error

    def update_weights(self, update: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class TrainerEngine(ABC):
    def __init__(self, config: Any, *, client: Any, source: Any, is_sender: bool = True) -> None:
        self.config = config
        self.is_sender = is_sender
        self.client = client
        self.source = source

    @classmethod
    @abstractmethod
    def trainer_init(cls, config: Any, init_info: Any, *, client: Any, source: Any) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...


class Factory:
    registry: ClassVar[dict[str, Any]]

    @classmethod
    def register_engine(cls, name: str, engine: Any) -> None:
        if name in cls.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registry[name] = engine


class Model:
    """Loads what it is given, as a model does: by copying."""

    def __init__(self) -> None:
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        self.reloading = False

    def load_weights(self, weights: Any) -> None:
        """Copy."""
        assert self.reloading
        self.weights = {name: np.asarray(tensor).copy() for name, tensor in weights}


@dataclass
class Tensor:
    """A tensor of the trainer's."""

    array: Any

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Any:
        return self.array


class Source(dict[str, Any]):
    """Names and arrays, given out as names and tensors at each iteration."""

    def __iter__(self) -> Any:
        return iter([(name, Tensor(array)) for name, array in self.items()])


class Client:
    """The control plane: calls every worker, one after the other."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        for engine in self.engines:
            engine.finish_weight_update()


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[type[Factory], type[Factory]]:
    """Have `import vllm` find this; returns the factories of engines and of trainers' engines."""
    factories = [type(name, (Factory,), {"registry": {}}) for name in ("Engines", "Trainers")]
    parts: dict[str, dict[str, Any]] = {
        "distributed.weight_transfer.base": {
            "TrainerInitInfo": TrainerInitInfo,
            "TrainerWeightTransferEngine": TrainerEngine,
            "WeightTransferEngine": Engine,
            "WeightTransferInitInfo": InitInfo,
            "WeightTransferUpdateInfo": UpdateInfo,
        },
        "distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": factories[0],
            "WeightTransferTrainerFactory": factories[1],
        },
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: setattr(model, "reloading", True),
            "finalize_layerwise_reload": lambda model, _config: setattr(model, "reloading", False),
        },
    }
    for path, names in parts.items():
        words = ["vllm", *path.split(".")]
        for length in range(1, len(words) + 1):
            name = ".".join(words[:length])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[f"vllm.{path}"]).update(names)
    if importlib.util.find_spec("torch") is None:
        torch = ModuleType("torch")
        torch.from_numpy = lambda array: array  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "asyncdist.weights.vllm", raising=False)
    return factories[0], factories[1]
