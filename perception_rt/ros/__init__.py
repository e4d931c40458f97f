"""Nodes, messages and parameters: the only part, with capture.ros_image, that imports rclpy."""
