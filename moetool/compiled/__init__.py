"""C++ that is compiled where it runs."""
