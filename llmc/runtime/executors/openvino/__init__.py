"""What the OpenVINO executors share: opening models, the blocks of a paged cache, and slots over blocks."""

from llmc.runtime.executors.openvino import importing as importing  # before any module here imports openvino
