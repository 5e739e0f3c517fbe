"""Local SGD and DiLoCo: device groups that train separately and synchronize periodically."""
