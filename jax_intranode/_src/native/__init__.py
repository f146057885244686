"""The C++ modules, and the names, limits and sizes that Python shares with them."""
