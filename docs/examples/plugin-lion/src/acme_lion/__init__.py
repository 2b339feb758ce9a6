"""Lion, Cohen's kappa and a NumPy exporter for NNx. Imports nothing by itself."""
