"""Engines that execute decisions, and the driver that runs the scheduler against one."""
