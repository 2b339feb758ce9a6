"""A whole run's configuration in one value and one YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nnx.enums import Nets
from nnx.params.base import YamlFile, check_keys, put
from nnx.params.identity import run_state
from nnx.params.model import NNModelParams
from nnx.params.net import NNParams, check_net_params
from nnx.params.registered import NNCheckpointTransform
from nnx.params.trainer import NNTrainerParams
from nnx.params.training import NNTrainParams
from nnx.utils import validation as check

_KEYS = ("id", "model", "net", "train", "trainer", "salt", "transforms")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(YamlFile):
    """What a ``run.yaml`` says, written by a run or by hand.

    One of ``train`` and ``trainer`` is needed. ``net`` belongs to a built-in
    network. The file's ``id``, when there is one, is not read: the id follows
    from the rest.
    """

    model: NNModelParams
    net: NNParams | None = None
    train: NNTrainParams | None = None
    trainer: NNTrainerParams | None = None
    salt: str | None = None
    transforms: tuple[NNCheckpointTransform, ...] = ()

    def __post_init__(self) -> None:
        owner = "RunConfig"
        check.instance(owner, "model", self.model, NNModelParams)
        for name, kind in (
            ("net", NNParams),
            ("train", NNTrainParams),
            ("trainer", NNTrainerParams),
        ):
            if getattr(self, name) is not None:
                check.instance(owner, name, getattr(self, name), kind)
        if self.train is None and self.trainer is None:
            check.refuse(owner, "train", None, "an NNTrainParams when there is no trainer")
        if isinstance(self.model.net, Nets):
            check_net_params(self.model.net, self.net)
        if self.salt is not None:
            put(self, salt=check.salt(owner, "salt", self.salt))
        put(self, transforms=tuple(self.transforms))
        for index, transform in enumerate(self.transforms):
            check.instance(owner, f"transforms[{index}]", transform, NNCheckpointTransform)

    @property
    def id(self) -> str | None:
        """The run id; ``None`` when only a ``trainer`` is given, since its run decides the rest."""
        return self.state().get("id")

    def state(self) -> dict[str, Any]:
        """The state of the run, as ``run.yaml`` holds it."""
        return run_state(
            net=self.net, model=self.model, train=self.train, trainer=self.trainer,
            salt=self.salt, transforms=self.transforms,
        )  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunConfig:
        """Rebuild from :meth:`state`; an unknown key is refused with close matches."""
        check_keys("a run", state, _KEYS)
        if "model" not in state:
            raise ValueError("a run needs the section 'model'")
        read: dict[str, Any] = {
            "model": NNModelParams.from_state,
            "net": NNParams.resolve_from_state,
            "train": NNTrainParams.from_state,
            "trainer": NNTrainerParams.from_state,
        }
        values = {key: read[key](state[key]) for key in read if state.get(key) is not None}
        if state.get("salt") is not None:
            values["salt"] = state["salt"]
        transforms = state.get("transforms") or ()
        if not isinstance(transforms, (list, tuple)):
            check.refuse("RunConfig", "transforms", transforms, "a list of transforms")
        return cls(
            **values, transforms=tuple(NNCheckpointTransform.from_state(s) for s in transforms)
        )

    def with_data(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        data_id: str | None = None,
    ) -> RunConfig:
        """The same configuration on the given data.

        Without ``data_id`` the id stays as it is: the data is not part of it.
        """
        changes: dict[str, Any] = {"train_loader": train_loader, "val_loader": val_loader}
        if data_id is not None:
            changes["data_id"] = data_id
        parts = {"train": self.train, "trainer": self.trainer}
        changed: dict[str, Any] = {
            k: dataclasses.replace(v, **changes) for k, v in parts.items() if v is not None
        }
        return dataclasses.replace(self, **changed)
