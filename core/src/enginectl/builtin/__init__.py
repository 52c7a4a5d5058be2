"""The parts that come with core. They register through core's own entry points, like everyone else's."""
