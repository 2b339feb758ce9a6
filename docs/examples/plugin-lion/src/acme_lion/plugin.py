"""What joins NNx. Names only: each is imported when it is first used."""

from __future__ import annotations

from nnx.plugins import hookimpl

nnx_hookspec_version = 1


@hookimpl
def nnx_optimizer_factories():
    return {("acme.lion", 1): "acme_lion.optim:build"}


@hookimpl
def nnx_metrics():
    return {("acme.kappa", 1): "acme_lion.kappa:KAPPA"}


@hookimpl
def nnx_exporters():
    return {"acme.npz": "acme_lion.export:to_npz"}
