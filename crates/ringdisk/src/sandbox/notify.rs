//! What the warden tells a service manager for the process inside.
//!
//! A datagram socket sends to every name of the machine, with descriptors and as the user of its
//! process, and no filter sees to whom: names are in memory. So the process inside has none. It
//! asks the warden for one of a few words, and the warden makes the message of it: of a text one
//! line of printable characters, the pid of its own parent, never a descriptor. Whoever has taken
//! the process over can lie to the manager about this service, and reaches nobody else.
//!
//! A manager hears the main process of a service only, unless it is told otherwise (`NotifyAccess=`
//! of systemd), and that is not the warden. Root may speak in the name of another process
//! (`SCM_CREDENTIALS`, unix(7)); for others the main process itself says that it is ready and
//! closes its socket with that, and what comes later is heard with `NotifyAccess=all`.

use super::duties::SAY;
use crate::notify::{Notify, Word};

/// An order to the warden, which gives no answer.
pub(super) fn order(word: Word, text: &str) -> Vec<u8> {
    [&[SAY, word.letter()], word.bounded(text).as_bytes()].concat()
}

/// The warden's side.
#[derive(Debug)]
pub(super) struct Speaker(Notify);

impl Speaker {
    /// For the process that the warden is for, with the manager of its environment.
    ///
    /// * `pid`: of that process.
    pub(super) fn new(pid: u32) -> Speaker {
        Speaker(Notify::in_the_name_of(pid))
    }

    /// Says what an order asks for; what is no word of these is not said.
    pub(super) fn say(&self, order: &[u8]) {
        if let Some((letter, text)) = order.split_first()
            && let Some(word) = Word::of(*letter)
        {
            self.0.say(word, &String::from_utf8_lossy(text));
        }
    }
}
