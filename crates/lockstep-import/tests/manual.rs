//! The tables of keys in docs/ match those of the code.

use std::fs;
use std::path::Path;

use lockstep_import::Format;

const BEGIN: &str = "<!-- keys -->\n";
const END: &str = "<!-- end of keys -->\n";

#[test]
fn the_tables_of_keys_are_current() {
    for format in [Format::DeepSpeed, Format::Accelerate] {
        let name = format!("coming-from-{}.md", format.word());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(&name);
        let text = fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_once(BEGIN).unwrap();
        let (table, after) = rest.split_once(END).unwrap();
        let current = format.keys_markdown();
        if std::env::var_os("LOCKSTEP_WRITE_DOCS").is_some() {
            fs::write(&path, format!("{before}{BEGIN}{current}{END}{after}")).unwrap();
            continue;
        }
        let differing = table.lines().zip(current.lines()).find(|(found, expected)| found != expected);
        assert!(table == current, "{name} is out of date: {differing:?}; LOCKSTEP_WRITE_DOCS=1 writes it");
    }
}
