"""The engine: the loop around scheduler and executor, and the front end that speaks text."""
