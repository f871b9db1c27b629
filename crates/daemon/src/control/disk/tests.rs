use std::cell::Cell;
use std::rc::Rc;

use ringdisk_disk::{Bytes, NullOptions};
use ringdisk_export::stats::QueueView;
use ringdisk_ring::{Config, Runtime};
use serde_json::Map;

use super::*;
use crate::control::protocol::Request;
use crate::control::server::Commands;
use crate::stats::Report;

/// Nobody asks it.
struct Nothing;

impl Serving for Nothing {
    fn report(&self) -> Report {
        unreachable!("no counters are asked for")
    }

    fn queues(&self) -> Vec<QueueView> {
        Vec::new()
    }

    fn topology(&self) -> Value {
        unreachable!("no topology is asked for")
    }
}

/// What is opened before has no rule afterwards.
#[test]
fn commands_that_change_the_disk_wait_until_the_process_is_confined() {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let disk = Disk::null(&NullOptions { size: Bytes(1 << 20), ..NullOptions::default() });
    let control = Rc::new(DiskControl::new(disk, Nothing, |_| ()).confined_later(true));
    for execute in ["snapshot", "backing", "commit", "stream", "resize"] {
        let (is_over, told) = (Rc::new(Cell::new(false)), Rc::clone(&control));
        let (over, inner) = (Rc::clone(&is_over), ring.clone());
        let progress = Arc::new(Progress::default());
        let for_command = Arc::clone(&progress);
        let arguments = match execute {
            "snapshot" => json!({ "file": "/nowhere/new" }),
            "backing" => json!({ "file": "/nowhere/other", "format": "raw" }),
            "resize" => json!({ "size": { "to": 1 << 20 } }),
            _ => json!({}),
        };
        let arguments = arguments.as_object().cloned().unwrap_or_else(Map::new);
        let request = Request { execute: execute.to_owned(), arguments, id: None };
        ring.spawn(async move {
            let _ = told.execute(&inner, &request, Vec::new(), &for_command).await;
            over.set(true);
        });
        runtime.block_on(ring.sleep(Duration::from_millis(50)));
        assert!(!is_over.get(), "{execute} did not wait");
        // The client that gave it up has the disk back.
        progress.cancel();
        runtime.block_on(async {
            while !is_over.get() {
                ring.sleep(Duration::from_millis(1)).await;
            }
        });
    }
    control.confined(String::from("all of it"));
    let progress = Arc::new(Progress::default());
    let arguments = json!({ "file": "/nowhere/new" }).as_object().cloned().unwrap_or_default();
    let request = Request { execute: String::from("snapshot"), arguments, id: None };
    let refused = runtime.block_on(control.execute(&ring, &request, Vec::new(), &progress));
    assert!(refused.is_err(), "a null disk has no overlay, and says so");
}

/// The helper process, which gets it, is there only when the process is about to be confined.
#[test]
fn the_word_of_a_user_waits_until_the_process_is_confined() {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let disk = Disk::null(&NullOptions { size: Bytes(1 << 20), ..NullOptions::default() });
    let control = Rc::new(DiskControl::new(disk, Nothing, |_| ()).confined_later(true));
    let (kept, word) = std::os::unix::net::UnixStream::pair().expect("sockets");
    kept.set_nonblocking(true).expect("a socket");
    // It is closed when it was passed on; nobody is there who would keep it.
    let is_passed_on = || matches!(std::io::Read::read(&mut &kept, &mut [0]), Ok(0));
    let (told, inner, is_over) = (Rc::clone(&control), ring.clone(), Rc::new(Cell::new(false)));
    let over = Rc::clone(&is_over);
    ring.spawn(async move {
        let request = Request { execute: String::from("commit"), arguments: Map::new(), id: None };
        let progress = Arc::new(Progress::default());
        let refused = told.execute(&inner, &request, vec![word.into()], &progress).await;
        assert!(refused.is_err(), "a null disk has nothing to commit");
        over.set(true);
    });
    runtime.block_on(ring.sleep(Duration::from_millis(50)));
    assert!(!is_passed_on(), "the word went nowhere");
    control.confined(String::from("all of it"));
    runtime.block_on(async {
        while !is_over.get() {
            ring.sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(is_passed_on());
}
