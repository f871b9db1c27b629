//! Interrupts a system call in which a thread waits.
//!
//! Promises: the call ends with EINTR; the interrupted thread pays nothing before that. Any thread.
//!
//! Another process that holds a descriptor too can make it blocking, since its flags are shared.
//! Where no call is sure not to wait, another thread interrupts it: a signal with an empty handler
//! makes the call end with EINTR.

use std::sync::OnceLock;

use rustix::io::Errno;

/// One that nothing else uses, and that means nothing to a process without a handler. Unlike a
/// real-time signal it is never refused because too many are waiting.
const SIGNAL: libc::c_int = libc::SIGURG;

/// The handler of the process.
static INSTALLED: OnceLock<Result<(), Errno>> = OnceLock::new();

/// A thread whose system calls can be ended.
#[derive(Debug)]
pub struct Interrupt {
    thread: i32,
}

impl Interrupt {
    /// For the calling thread. The first one of the process installs a handler of SIGURG.
    ///
    /// Errors: the system refuses the handler.
    pub fn of_this_thread() -> Result<Interrupt, Errno> {
        (*INSTALLED.get_or_init(install))?;
        Ok(Interrupt { thread: rustix::thread::gettid().as_raw_nonzero().get() })
    }

    /// Ends the call that the thread waits in, with EINTR. Nothing happens when it waits in none,
    /// so it may have to be sent again: the thread may begin to wait a moment later.
    pub fn send(&self) {
        let process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: tgkill(2) takes three integers. The thread is of this process, or the number is
        // unused, or that of a later thread of this process, whose calls are repeated as after
        // any signal.
        let _ = unsafe { libc::syscall(libc::SYS_tgkill, process, self.thread, SIGNAL) };
    }
}

fn install() -> Result<(), Errno> {
    // SAFETY: an all-zero `sigaction` is a valid value of the C structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // Without SA_RESTART: the call shall end.
    action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: `action` lives across the call, and the handler does nothing.
    if unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) } == 0 {
        Ok(())
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }
}

extern "C" fn on_signal(_: libc::c_int) {}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_write_that_waits_for_ever_ends() {
        let event = eventfd(u32::MAX, EventfdFlags::CLOEXEC).unwrap();
        let room = u64::MAX - 1 - u64::from(u32::MAX);
        rustix::io::write(&event, &room.to_ne_bytes()).unwrap();
        let (sender, receiver) = channel();
        let (done, result) = channel();
        let thread = std::thread::spawn(move || {
            sender.send(Interrupt::of_this_thread().unwrap()).unwrap();
            done.send(rustix::io::write(&event, &1u64.to_ne_bytes())).unwrap();
        });
        let interrupt = receiver.recv().unwrap();

        let ended = std::iter::repeat_with(|| {
            interrupt.send();
            result.recv_timeout(Duration::from_millis(20))
        })
        .find(|ended| *ended != Err(RecvTimeoutError::Timeout));

        assert_eq!(ended, Some(Ok(Err(Errno::INTR))));
        thread.join().unwrap();
        // The thread has ended.
        interrupt.send();
    }
}
