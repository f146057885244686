"""The C++ modules, and what Python shares with them: names, limits and call sites."""
