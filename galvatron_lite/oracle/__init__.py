"""The oracle: what data, spatial, pipeline, filter and channel parallelism cost as devices are added."""
