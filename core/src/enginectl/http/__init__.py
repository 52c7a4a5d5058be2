"""What every frontend shares: error bodies, strict JSON in, event streams out, keys, and the record of a request."""
