"""Memory channels, the store behind them, ownership and the fabric."""
