//! Two network namespaces, which act as two hosts. They need root and iproute2.

use std::process::{Command, Stdio};

/// Two unconnected namespaces; deleted when dropped.
pub(crate) struct Namespaces {
    pub(crate) names: [String; 2],
}

impl Namespaces {
    /// Creates two namespaces with `label` in their names; `None` if this process may not.
    pub(crate) fn new(label: &str) -> Option<Self> {
        let id = std::process::id();
        let namespaces = Self { names: ["a", "b"].map(|name| format!("lockstep-{label}-{id}-{name}")) };
        namespaces.names.iter().all(|name| ip(&format!("netns add {name}"))).then_some(namespaces)
    }

    /// Assigns the address to `interface` in the namespace `name` and brings it and the loopback up; returns false if that fails.
    pub(crate) fn bring_up(name: &str, interface: &str, address: &str) -> bool {
        [
            format!("-n {name} address add {address}/24 dev {interface}"),
            format!("-n {name} link set lo up"),
            format!("-n {name} link set {interface} up"),
        ]
        .iter()
        .all(|command| ip(command))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns delete {name}"));
        }
    }
}

/// Runs `ip COMMAND`; returns true if it succeeds.
pub(crate) fn ip(command: &str) -> bool {
    let mut ip = Command::new("ip");
    ip.args(command.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ip.status().is_ok_and(|status| status.success())
}
