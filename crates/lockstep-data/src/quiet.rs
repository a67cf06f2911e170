//! Calls code that panics on bad input, without printing the panic message.
//!
//! The message would precede our own, which describes the problem of the input. A panic hook, installed once, drops the
//! messages of threads inside [`caught`] and passes all others to the previous hook.

use std::{
    cell::Cell,
    panic::{self, AssertUnwindSafe},
    sync::Once,
};

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Returns the result of `call`, or `None` if it panics. After a panic, values that `call` used may only be dropped or
/// passed to a further `caught`.
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
