//! What the helper process tells a service manager for the process inside.
//!
//! A datagram socket sends to every name of the machine, with descriptors and as the user of its
//! process, and no filter sees to whom: names are in memory. So the process inside has none. It
//! asks the helper process for one of a few words, and the helper process makes the message of it:
//! of a text one line of printable characters, the pid of its own parent, never a descriptor.
//! Promises: an attacker who has taken the process over can lie to the manager about this service,
//! and can reach no other process.
//!
//! A manager hears the main process of a service only, unless it is told otherwise (`NotifyAccess=`
//! of systemd), and that is not the helper process. Root may speak in the name of another process
//! (`SCM_CREDENTIALS`, unix(7)); for others the main process itself says that it is ready and
//! closes its socket with that, and what comes later is heard with `NotifyAccess=all`. With that
//! last word the manager's watchdog is switched off, and the helper process switches it on again,
//! if it is heard: where it is not, the manager must not take the process for dead.

use super::tasks::SAY;
use crate::notify::{Notify, Word, watch};

/// An order to the helper process, which gives no answer.
pub(crate) fn order(word: Word, text: &str) -> Vec<u8> {
    [&[SAY, word.letter()], word.bounded(text).as_bytes()].concat()
}

/// The helper process's side.
#[derive(Debug)]
pub(crate) struct Speaker(Option<Notify>);

impl Speaker {
    /// Speaks for the server of this helper process, to the manager in the environment.
    ///
    /// * `pid`: of that process.
    pub(crate) fn new(pid: u32) -> Speaker {
        Speaker(Some(Notify::in_the_name_of(pid)))
    }

    /// Says nothing: a helper process that keeps a mount or disks hears its server over their own
    /// socket, and speaks to the manager for itself.
    pub(crate) fn silent() -> Speaker {
        Speaker(None)
    }

    /// Sends the message that an order asks for; drops an order that is none of these words.
    pub(crate) fn say(&self, order: &[u8]) {
        if let Some(manager) = &self.0
            && let Some((letter, text)) = order.split_first()
            && let Some(word) = Word::of(*letter)
        {
            let text = match word {
                // The server does not choose this text.
                Word::Alive => std::env::var(watch::USEC).unwrap_or_default(),
                _ => String::from_utf8_lossy(text).into_owned(),
            };
            manager.say(word, &text);
        }
    }
}
