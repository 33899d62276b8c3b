"""What both schedulers share: the lifecycle of requests, admission, memory of a step, stop conditions."""
