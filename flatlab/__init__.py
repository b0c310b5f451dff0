"""The package beneath the scripts: sandboxes, episodes, training, search trees and run directories."""
