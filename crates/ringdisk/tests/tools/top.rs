//! `ringdisk top` in a pseudo-terminal, with an emulator that says what a person would see.

use std::fs;
use std::io::{Read, Write};
use std::num::NonZero;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::tools::ringdisk;
use crate::common::{program, serve};

/// Largest terminal of the tests; the emulator has that size.
const ROWS: NonZero<u16> = NonZero::new(24).expect("rows");

fn size(columns: u16) -> NonZero<u16> {
    NonZero::new(columns).expect("columns")
}

/// A shell in a pseudo-terminal of its own, made by script(1), that runs `ringdisk`.
pub(super) struct Terminal {
    script: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<(vt100::Parser, Vec<u8>)>>,
    directory: tempfile::TempDir,
}

impl Terminal {
    /// * `columns`: its width.
    pub(super) fn start(columns: u16, arguments: &str) -> Terminal {
        let directory = scratch();
        let d = text(directory.path());
        let program = program();
        let run = format!(
            "stty cols {columns} rows {ROWS}; tty >{d}/tty; stty -a >{d}/before; \
             sh -c 'echo $$ >{d}/pid; exec {program} {arguments}'; echo $? >{d}/code; \
             stty -a >{d}/after; echo the-shell-goes-on"
        );
        let mut command = Command::new("script");
        command.args(["-qefc", &run, "/dev/null"]).env("TERM", "xterm");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut script = command.spawn().expect("script of util-linux");
        let (keys, mut out) = (script.stdin.take(), script.stdout.take().expect("a pipe"));
        let screen = Arc::new(Mutex::new((vt100::Parser::new(ROWS, size(columns), 0), Vec::new())));
        let shown = Arc::clone(&screen);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = out.read(&mut bytes) {
                let mut screen = shown.lock().expect("no panic");
                screen.0.process(&bytes[..count]);
                screen.1.extend_from_slice(&bytes[..count]);
            }
        });
        Terminal { script, keys: keys.expect("a pipe"), screen, directory }
    }

    pub(super) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("keys");
    }

    fn lines(&self) -> Vec<String> {
        let screen = self.screen.lock().expect("no panic");
        let (_, columns) = screen.0.screen().size();
        screen.0.screen().rows(0, columns.get()).collect()
    }

    /// Waits for a screen.
    pub(super) fn shows(&self, what: &str, is_it: impl Fn(&[String]) -> bool) -> Vec<String> {
        let found = until(LIMIT, || Some(self.lines()).filter(|lines| is_it(lines)));
        found.unwrap_or_else(|| panic!("{what}: {:#?}", self.lines()))
    }

    pub(super) fn shows_words(&self, words: &str) -> Vec<String> {
        self.shows(words, |lines| lines.iter().any(|line| line.contains(words)))
    }

    pub(super) fn resize(&self, columns: u16) {
        self.screen.lock().expect("no panic").0.screen_mut().set_size(ROWS, size(columns));
        let tty = self.file("tty");
        let columns = columns.to_string();
        let done = Command::new("stty").args(["-F", &tty, "cols", &columns]).status();
        assert!(done.expect("stty").success());
    }

    fn file(&self, name: &str) -> String {
        let file = self.directory.path().join(name);
        let content = until(LIMIT, || fs::read_to_string(&file).ok().filter(|c| c.ends_with('\n')));
        content.unwrap_or_else(|| panic!("no {name}: {:#?}", self.lines())).trim().to_owned()
    }

    fn signal(&self, signal: Signal) {
        let pid = self.file("pid").parse().expect("a number");
        kill_process(Pid::from_raw(pid).expect("a process"), signal).expect("kill");
    }

    /// The terminal is gone. Gives the process that ran in it.
    pub(super) fn hang_up(&mut self) -> String {
        let pid = self.file("pid");
        self.script.kill().expect("kill");
        self.script.wait().expect("it ends");
        pid
    }

    /// Waits for the end of the program: its exit code. The terminal is as it was before.
    pub(super) fn ends(mut self) -> String {
        let code = self.file("code");
        assert_eq!(self.file("after"), self.file("before"), "settings of the terminal");
        self.shows_words("the-shell-goes-on");
        let screen = self.screen.lock().expect("no panic");
        assert!(!screen.0.screen().alternate_screen() && !screen.0.screen().hide_cursor());
        drop(screen);
        self.script.wait().expect("it ends");
        code
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

fn disk(directory: &Path) -> Mounted {
    let image = directory.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    serve(&image, &[])
}

#[test]
fn top_is_a_screen_at_20_80_and_200_columns_that_keys_filter_sort_and_end() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let disk = disk(directory.path());
    let name = disk.path().file_name().expect("a name").to_string_lossy().into_owned();
    for columns in [20, 80, 200] {
        let arguments = format!("top --every 200ms --filter {}", disk.text());
        let mut terminal = Terminal::start(columns, &arguments);
        let tail: String = name.chars().skip(name.chars().count().saturating_sub(6)).collect();
        let shown = terminal.shows("the disk", |lines| {
            lines[1].contains("READS/s") && lines[2].trim_end().ends_with(&tail)
        });
        assert!(shown[0].starts_with("1 disk"), "{shown:#?}");
        assert!(shown[23].starts_with("q quit"), "{shown:#?}");
        assert_eq!(shown[1].contains("p99"), columns >= 80, "{shown:#?}");
        assert_eq!(shown[1].contains("HITS"), columns >= 200, "{shown:#?}");
        terminal.press("/no-such-disk");
        terminal.shows_words("no disk with this n");
        terminal.press("\u{1b}");
        terminal.shows("all disks", |lines| !lines[2].starts_with("no disk"));
        terminal.press(if columns == 80 { "\u{3}" } else { "q" });
        assert_eq!(terminal.ends(), "0");
    }
    let mut terminal = Terminal::start(80, "top --every 200ms");
    terminal.shows_words("by requests");
    terminal.press("s");
    terminal.shows_words("by bytes");
    terminal.press("n");
    terminal.shows_words("by name");
    terminal.press(" ");
    terminal.shows_words("held");
    terminal.press("q");
    assert_eq!(terminal.ends(), "0");
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn top_follows_the_size_of_its_terminal_and_gives_it_back_after_sigterm() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let disk = disk(directory.path());
    let terminal = Terminal::start(20, &format!("top --filter {}", disk.text()));
    terminal.shows("narrow", |lines| lines[1].contains("READS/s") && !lines[1].contains("p99"));
    terminal.resize(120);
    terminal.shows("wide", |lines| lines[1].contains("p99") && lines[1].contains("HITS"));
    terminal.resize(20);
    terminal.shows("narrow again", |lines| {
        lines[1].contains("READS/s") && !lines[1].contains("WRITES")
    });
    terminal.signal(Signal::TERM);
    assert_eq!(terminal.ends(), "0");
    // A terminal that has gone: nobody is left to end it.
    let mut terminal = Terminal::start(80, &format!("top --filter {}", disk.text()));
    terminal.shows_words("q quit");
    let pid = terminal.hang_up();
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let gone = until(LIMIT, || (state().is_empty() || state().contains(") Z ")).then_some(()));
    gone.unwrap_or_else(|| panic!("it goes on: {}", state()));
    // As often as was asked for.
    let terminal = Terminal::start(80, "top --every 100ms -n 2");
    assert_eq!(terminal.ends(), "0");
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn top_without_a_screen_prints_tables_that_fit() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let disk = disk(d);
    let plain = ringdisk(d, &["top", "--every", "100ms", "-n", "2"]).ok().out;
    assert_eq!(plain.matches("READS/s").count(), 2, "{plain}");
    let line = plain.lines().find(|line| line.contains(disk.text())).expect("its line");
    assert!(!plain.contains('\u{1b}') && line.trim_start().starts_with('0'), "{line}");
    // On a terminal where it is told so, where that can do nothing, and without a keyboard.
    let filter = format!("--filter {} --every 100ms -n 3", disk.text());
    for arguments in [format!("top --plain {filter}"), format!("top {filter} </dev/null")] {
        let terminal = Terminal::start(22, &arguments);
        assert_eq!(terminal.file("code"), "0");
        terminal.shows_words("the-shell-goes-on");
        let bytes = terminal.screen.lock().expect("no panic").1.clone();
        let out = String::from_utf8_lossy(&bytes);
        assert!(!out.contains('\u{1b}') && out.contains("READS/s"), "{out:?}");
        assert!(out.lines().all(|line| line.trim_end().chars().count() <= 22), "{out:?}");
        assert_eq!(terminal.ends(), "0");
    }
    assert_eq!(disk.stop().code(), Some(0));
}
