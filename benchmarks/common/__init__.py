"""What all benchmarks share: flags, machine, samples of stopped runs, report, rivals, figures."""
