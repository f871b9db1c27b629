//! What the control thread of an export has, and how the serving of a front end ends.
//!
//! Promises: plain values; [`super::control`] waits and acts with them, and [`super::kept`] records
//! them where another process goes on after a kill.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_export::SecondExport;

use super::backend::Control;
use super::hand_over::FrontEnd;
use super::options::Second;
use super::record::{Pending, Record};
use super::sockets::FrontEndSource;
use crate::Error;
use crate::hand_over_state::{Role, Unpacked};
use crate::protocol::Reply;
use crate::session::SessionConfig;
use crate::signals::Signals;

/// From the first byte of a message to its last, and for a reply to be taken.
pub(super) const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// How a connection ended.
pub(super) enum End {
    /// The front end has gone; another one may come.
    Gone,
    /// The export was asked to stop.
    Stopped,
    /// An I/O error, and nothing is answered any more.
    GaveUp,
    /// Another process goes on.
    HandedOver,
    /// A queue thread ended by a defect of ours.
    Panicked,
    /// What has to be known after a kill is not kept.
    NotKept(Error),
}

/// What the control thread needs.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) control: Control,
    pub(super) source: FrontEndSource,
    pub(super) session: SessionConfig,
    pub(super) second: Second,
    pub(super) signals: Arc<Signals>,
    pub(super) name: String,
    /// A front end that another process has handed over, whose virtqueues do not run yet.
    pub(super) front_end: Option<FrontEnd>,
    /// Second front ends are to be sent away, and do not wake us at the moment ([`Host::watch`]).
    pub(super) is_deaf: bool,
    /// Where the state goes, if another process goes on when this one is killed.
    pub(super) record: Option<Record>,
    /// What a process that was killed left half done.
    pub(super) left: Left,
    /// A second export of the disk.
    pub(super) beside: Option<Arc<dyn SecondExport>>,
}

/// What a process that was killed left half done.
#[derive(Debug, Default)]
pub(super) enum Left {
    /// Nothing.
    #[default]
    Nothing,
    /// A message is to be carried out again.
    Message(Pending),
    /// A reply that is perhaps not sent.
    Reply(Option<Reply>),
}

impl Left {
    /// What the state of that process says.
    pub(super) fn of(state: &mut Unpacked) -> Left {
        let fds = state.all(Role::Pending);
        let reply_fds = state.all(Role::ReplyDescriptor);
        let Some(kept) = &mut state.words.kept else { return Left::Nothing };
        match (kept.pending.take(), kept.reply.take()) {
            (Some(words), _) => Left::Message(Pending { words, fds }),
            (None, reply) => Left::Reply(reply.map(|bytes| Reply::again(bytes, reply_fds))),
        }
    }
}
