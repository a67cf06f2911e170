//! A thread that ends when its handle is dropped, even while it waits for descriptors.

use std::{
    io,
    os::fd::OwnedFd,
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use rustix::event::{EventfdFlags, eventfd};

/// Handle of the thread.
#[derive(Debug)]
pub(crate) struct StoppableThread {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl StoppableThread {
    /// Starts `run`, which gets the descriptor that becomes readable when it must end.
    ///
    /// # Errors
    /// If the system refuses a thread or an event counter.
    pub(crate) fn spawn(name: &str, run: impl FnOnce(&OwnedFd) + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let thread = Builder::new().name(name.to_owned()).spawn(move || run(&stopped))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for StoppableThread {
    fn drop(&mut self) {
        // A write fails only if the event counter is at its limit, where it reads as set too.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
