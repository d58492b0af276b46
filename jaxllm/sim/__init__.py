"""The serving engine on a virtual clock: the real core, scheduler and memory, and a device that is modelled."""
