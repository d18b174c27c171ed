"""FX passes, one a file: each takes a GraphModule and returns a GraphModule or a report."""
