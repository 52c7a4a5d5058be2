"""The engine: loop, persistent batch, runner, and the client both sides of the process boundary share."""
