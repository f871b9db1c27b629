//! Several commits and streams of one chain at once, while a client works.

use std::path::PathBuf;

use ringdisk_testkit::images::{self, assert_clean};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, text};
use tempfile::TempDir;

use super::jobs::{
    WRITTEN, assert_pattern, assert_written, beside_a_writer, ctl, job, layers, sample, seen,
    until_state, write,
};
use crate::common::MIB;

/// Where `c3`, `c4`, `c5` and `top` have data, and how much, MiB; a client writes from 32 on. `c4`
/// has more than a commit copies at once, so its limit holds that one up.
const DATA: [(u64, u64); 4] = [(16, 3), (19, 7), (26, 3), (29, 3)];

/// A chain of six with data in each, and the paths of `c3` and `c4`, two above the bottom.
fn six() -> (Mounted, TempDir, [PathBuf; 4]) {
    let (disk, directory, base, over) = sample();
    let names =
        ["c3", "c4", "c5", "top"].map(|name| directory.path().join(format!("{name}.qcow2")));
    for (pattern, (name, (offset, len))) in (10..).zip(names.iter().zip(DATA)) {
        ctl(&disk, &["snapshot", text(name)]).ok();
        write(&disk, pattern, offset * MIB, len * MIB);
    }
    let [c3, c4, ..] = names;
    (disk, directory, [base, over, c3, c4])
}

fn assert_content(disk: &Mounted) {
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    for (pattern, (offset, len)) in (10..).zip(DATA) {
        assert_pattern(disk.path(), pattern, offset * MIB, len * MIB);
    }
}

/// The upper one writes the image that the lower one has name another backing file.
#[test]
fn two_commits_below_the_top_run_at_once_and_a_third_is_refused() {
    if !needs_root() {
        return;
    }
    let (disk, directory, [base, over, c3, c4]) = six();
    let c5 = directory.path().join("c5.qcow2");
    let commit = |top: &PathBuf, base: &PathBuf, words: &[&str]| {
        let chosen = ["commit", "--top", text(top), "--base", text(base)];
        ctl(&disk, &[&chosen[..], words].concat())
    };
    let slow = |id| ["--background", "--speed", "64k", "--name", id];
    let written = beside_a_writer(&disk, || {
        commit(&c4, &c3, &slow("upper")).ok();
        commit(&over, &base, &slow("lower")).ok();
        ["upper", "lower"].into_iter().for_each(|id| drop(until_state(&disk, id, "running")));
        // Those that overlap are refused, and the message names image and job.
        let told = commit(&c5, &c4, &[]).ends(5);
        told.says("the job 'upper'").says("holds the image").says("c4.qcow2");
        commit(&c3, &over, &[]).ends(5).says("holds the image");
        let told = ctl(&disk, &["commit"]).ends(5);
        told.says("one more commit of other images below the one on top may run");
        ctl(&disk, &["stream"]).ends(5).says("holds the image");
        // Either is given up or ends by itself, the one above first.
        job(&disk, "cancel", &["upper"]).ok();
        job(&disk, "wait", &["upper"]).ends(1);
        commit(&c4, &c3, &slow("again")).ok();
        until_state(&disk, "again", "running");
        job(&disk, "limit", &["again", "0"]).ok();
        job(&disk, "wait", &["again"]).ok();
        assert_eq!(layers(&disk), ["top", "c5", "c3", "over", "base"].map(named));
        assert_eq!(seen(&disk, "lower")["state"], "running");
        job(&disk, "limit", &["lower", "0"]).ok();
        job(&disk, "wait", &["lower"]).ok();
    });
    assert_eq!(layers(&disk), ["top", "c5", "c3", "base"].map(named));
    assert_content(&disk);
    assert_written(disk.path(), written);
    assert_eq!(disk.stop().code(), Some(0));
    for name in ["top", "c5", "c4", "c3", "over", "base"] {
        assert_clean(&directory.path().join(named(name)));
    }
    let whole = images::reference(&directory.path().join("top.qcow2"), "qcow2");
    assert_pattern(&whole, 13, 29 * MIB, 3 * MIB);
}

/// The base of the stream stays, and the commit has it name another backing file.
#[test]
fn a_stream_runs_beside_a_commit_of_images_below_its_base() {
    if !needs_root() {
        return;
    }
    let (disk, directory, [base, over, c3, c4]) = six();
    let commit = |top: &PathBuf, base: &PathBuf, words: &[&str]| {
        let chosen = ["commit", "--top", text(top), "--base", text(base)];
        ctl(&disk, &[&chosen[..], words].concat())
    };
    let slow = |id| ["--background", "--speed", "64k", "--name", id];
    let written = beside_a_writer(&disk, || {
        let stream = ["stream", "--base", text(&c3)];
        ctl(&disk, &[&stream[..], &slow("pull")].concat()).ok();
        commit(&over, &base, &slow("lower")).ok();
        ["pull", "lower"].into_iter().for_each(|id| drop(until_state(&disk, id, "running")));
        commit(&c4, &c3, &[]).ends(5).says("the job 'pull'").says("holds the image");
        commit(&c3, &over, &[]).ends(5).says("holds the image");
        ctl(&disk, &["commit"]).ends(5).says("holds the image");
        job(&disk, "limit", &["lower", "0"]).ok();
        job(&disk, "wait", &["lower"]).ok();
        assert_eq!(layers(&disk), ["top", "c5", "c4", "c3", "base"].map(named));
        assert_eq!(seen(&disk, "pull")["state"], "running");
        job(&disk, "limit", &["pull", "0"]).ok();
        job(&disk, "wait", &["pull"]).ok();
    });
    assert_eq!(layers(&disk), ["top", "c3", "base"].map(named));
    assert_content(&disk);
    assert_written(disk.path(), written);
    assert_eq!(disk.stop().code(), Some(0));
    for name in ["top", "c5", "c4", "c3", "over", "base"] {
        assert_clean(&directory.path().join(named(name)));
    }
    let whole = images::reference(&directory.path().join("top.qcow2"), "qcow2");
    assert_pattern(&whole, 11, 19 * MIB, 7 * MIB);
}

#[test]
fn not_more_than_two_commits_run_at_once() {
    if !needs_root() {
        return;
    }
    let (disk, directory, [base, over, c3, c4]) = six();
    let more = ["c6", "c7"].map(|name| directory.path().join(named(name)));
    more.iter().for_each(|name| drop(ctl(&disk, &["snapshot", text(name)]).ok()));
    let commit = |top: &PathBuf, base: &PathBuf, words: &[&str]| {
        let chosen = ["commit", "--top", text(top), "--base", text(base)];
        ctl(&disk, &[&chosen[..], words].concat())
    };
    let slow = |id| ["--background", "--speed", "64k", "--name", id];
    commit(&c4, &c3, &slow("upper")).ok();
    commit(&over, &base, &slow("lower")).ok();
    let [c5, top] = ["c5", "top"].map(|name| directory.path().join(named(name)));
    let told = commit(&top, &c5, &[]).ends(5);
    told.says("one more commit of other images below the one on top may run");
    job(&disk, "cancel", &["lower"]).ok();
    job(&disk, "wait", &["lower"]).ends(1);
    commit(&top, &c5, &[]).ok();
    job(&disk, "limit", &["upper", "0"]).ok();
    job(&disk, "wait", &["upper"]).ok();
    assert_eq!(layers(&disk), ["c7", "c6", "c5", "c3", "over", "base"].map(named));
    assert_content(&disk);
    assert_eq!(disk.stop().code(), Some(0));
}

fn named(name: &str) -> String {
    format!("{name}.qcow2")
}
