//! The settings of a run by which its ranks join each other.

use std::time::Duration;

use lockstep_comm::TcpOptions;

use crate::RunConfig;

impl RunConfig {
    /// Returns the time without a heartbeat after which a rank counts as lost.
    pub fn heartbeat(&self) -> Duration {
        Duration::from_millis(self.elastic.heartbeat_ms)
    }

    /// Returns the options with which the ranks of this run join over TCP.
    pub fn tcp_options(&self) -> TcpOptions {
        TcpOptions {
            streams: self.parallel.tcp_connections,
            settings: self.digest(),
            silence: self.heartbeat(),
            encrypt: self.parallel.encrypt,
            ..TcpOptions::default()
        }
    }
}
