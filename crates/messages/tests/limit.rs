//! A process that may not have as many descriptors as come. A program of its own: the limit is that
//! of the whole process.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd};

use ringdisk_messages::{Wait, pair, receive, send};
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn descriptors_for_which_there_is_no_place_in_this_process_are_said_to_be_lost() {
    let (ours, theirs) = pair(SocketType::SEQPACKET).expect("sockets");
    let file = tempfile::tempfile().expect("a file");
    send(&ours, &[IoSlice::new(b"x")], &[file.as_fd(); 200], Wait::Never).expect("sent");
    let old = getrlimit(Resource::Nofile);
    // Room for some of them.
    let room = u64::try_from(theirs.as_raw_fd()).expect("a number") + 100;
    let less = Rlimit { current: Some(room), maximum: old.maximum };
    setrlimit(Resource::Nofile, less).expect("a lower limit");
    let mut bytes = [0; 8];
    let message = receive(&theirs, &mut bytes, Wait::Never);
    setrlimit(Resource::Nofile, old).expect("the limit as before");
    let message = message.expect("received");
    assert!(message.has_lost && message.descriptors.len() < 200);
    assert_eq!(message.whole().expect_err("lost"), Errno::MFILE);
}
