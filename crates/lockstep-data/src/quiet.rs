//! Calls into code that panics on bad input, without the message that a panic prints.
//!
//! The message would stand in front of our own, which says what is wrong with the input. A hook that is set once
//! passes every panic on to the hook before it, except those of a thread that is in [`caught`].

use std::{
    cell::Cell,
    panic::{self, AssertUnwindSafe},
    sync::Once,
};

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `call` returns; `None` if it panics. What it worked on must not be used after that, except to be dropped
/// or to be asked the same way.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                loud(info);
            }
        }));
    });
    let before = IS_QUIET.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    IS_QUIET.set(before);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_none_and_the_thread_is_loud_again_afterwards() {
        assert_eq!(caught(|| 7), Some(7));
        assert_eq!(caught(|| -> i32 { panic!("must not be printed") }), None);
        assert!(!IS_QUIET.get());
    }
}
