"""The scheduler and its cache over recorded or made-up requests, in simulated time. No model, no torch."""
