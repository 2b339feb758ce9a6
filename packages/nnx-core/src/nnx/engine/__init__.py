"""The training engine: one loop, one update engine, for every facade and step owner.

A request (:mod:`~nnx.engine.request`) is checked and built into a plan
(:mod:`~nnx.engine.plan`, every refusal happens there), becomes a live session
(:mod:`~nnx.engine.session`), runs through the loop (:mod:`~nnx.engine.loop`) and is
committed epoch by epoch (:mod:`~nnx.engine.commit`).
"""
