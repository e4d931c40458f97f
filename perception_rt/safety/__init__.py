"""The safety link: PDU, E2E protection, transports, reference receiver. No ROS."""
