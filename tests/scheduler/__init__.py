"""Tests of the scheduler by itself, without a pool, a loop or a device."""
