"""The command line: compose, help, sweeps, GPU leases."""
