//! Which users may connect to a Unix socket.

use std::time::Duration;

use ringdisk_nbd::{AllowedUsers, NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::numbers::command;
use ringdisk_nbd_protocol::request::Style;

use crate::client::{Server, null, options, request};

#[test]
fn root_may_always_connect_and_others_by_user_or_group() {
    let allowed = AllowedUsers { users: vec![1000], groups: vec![50] };
    assert!(allowed.allows(0, 0) && allowed.allows(1000, 1) && allowed.allows(7, 50));
    assert!(!allowed.allows(50, 1000) && !allowed.allows(1, 0));
}

#[test]
fn a_process_of_another_user_is_sent_away_without_a_greeting() {
    let user = rustix::process::getuid().as_raw();
    let named = |user| AllowedUsers { users: vec![user], groups: Vec::new() };
    let start = |allowed| {
        let options = NbdOptions { allowed_users: Some(allowed), ..options(1) };
        Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], options)
    };
    let server = start(named(user));
    let mut client = server.client(Style::Simple);
    assert_eq!(client.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
    if user == 0 {
        // Root is never sent away; `crates/ringdisk/tests/rights` has another user.
        return;
    }
    let server = start(named(user + 1));
    assert!(server.connect().is_closed());
}
