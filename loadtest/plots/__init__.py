"""Charts of a result. A `Figure` is data only; `png`, `table` and the page's script draw it."""
